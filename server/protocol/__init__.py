"""What a request may say: its fields, their limits, and what is refused. Knows no model and no engine."""
