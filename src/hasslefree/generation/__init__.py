"""Text from models: one prompt or a conversation, by the compressed model and by the dense one."""
