"""Recipes as given (`recipe`) and resolved (`resolved`), and YAML files with recipes."""
