"""A verdict for people: on a terminal, in a pull request, in a browser."""
