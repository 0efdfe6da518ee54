"""All probes of one model on one device, kept so that a search can be resumed and shared."""
