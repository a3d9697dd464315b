"""Folders for readers that do not know hasslefree."""
