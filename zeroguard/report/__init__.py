"""What a session shows: the summary table."""
