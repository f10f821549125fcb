"""moewe serves Mixture-of-Experts language models; this is its facade."""

__version__ = "0.1.0"
