"""`moewe plan`: what a layout takes on a machine, and which layout suits."""
