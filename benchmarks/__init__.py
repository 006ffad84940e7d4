"""What accumulation costs, measured against its peers: one file per claim."""
