"""What a search shows while it goes on, and what is read of it afterwards."""
