"""From a wish to the settings that fulfil it: every lever tried on estimates, no device."""
