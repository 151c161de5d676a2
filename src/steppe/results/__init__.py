"""What a run leaves behind: schema, tables, statistics."""
