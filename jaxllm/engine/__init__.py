"""From a prompt to outputs: requests in and out of the scheduler, step by step. Knows no device."""
