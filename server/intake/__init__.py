"""From a checked body to what an engine takes: templates, tools, grammars, token ids."""
