"""Why a training ended: logs and snapshots."""
