"""What the page says of a search, a file for each section, and the whole page."""
