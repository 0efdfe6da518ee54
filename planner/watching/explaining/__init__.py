"""Why a training ended or limps: from its log, or a snapshot of its memory, to what to do."""
