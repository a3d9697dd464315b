"""What is asked for (`recipe`), what that means (`resolved`), and its forms as YAML and as options."""
