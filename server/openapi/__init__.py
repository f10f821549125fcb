"""What the API is, told from the tables that requests are checked by: /openapi.json and docs/api.md."""
