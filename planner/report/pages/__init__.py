"""What the page says of a predicted step, a file for each section."""
