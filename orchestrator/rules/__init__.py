"""What must hold of a config before anything is submitted; each broken rule is a sentence."""
