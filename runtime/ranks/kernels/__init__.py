"""What the ranks of a GPU do with rows of logits; imports no Triton by itself (part of runtime)."""
