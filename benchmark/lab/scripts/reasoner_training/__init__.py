"""What trains the embedded reasoning model, apart from the command itself (`train_reasoner.py`)."""
