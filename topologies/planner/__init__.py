"""Plans: what a layout takes on a machine, and which layout suits (part of topologies)."""
