"""Record what a run leaves: requests, samples, summaries, reports and plots."""
