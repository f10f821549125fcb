"""Parts of a decoder on GPUs that are neither attention nor experts; imports no Triton by itself (part of models)."""
