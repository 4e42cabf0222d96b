"""The check of an allocation's nodes before anything runs on them."""
