"""`moewe eval`: what answers are worth: perplexity, agreement of formats and topologies, needles in long texts."""
