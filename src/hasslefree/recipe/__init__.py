"""Recipes as given (`recipe`) and resolved (`resolved`), and their forms as YAML and command-line options."""
