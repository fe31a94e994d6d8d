"""What is asked of a component: requests, traces, recordings, batches."""
