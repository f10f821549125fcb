"""What commands write to the terminal: text, bars, lines for an operator."""
