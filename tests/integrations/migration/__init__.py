"""What other attention libraries compute, and what is written here in its place: docs/integrations/migration.md."""
