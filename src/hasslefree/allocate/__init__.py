"""What is done between the layers and the model: targets, matching, allocation."""
