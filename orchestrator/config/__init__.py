"""What a user may say: the schema, composition by Hydra, planning, and freezing into cells."""
