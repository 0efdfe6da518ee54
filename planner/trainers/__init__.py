"""A setting in the words of the trainer that people use."""
