"""What happens to rewards between the task and the advantages: pure functions and small states, one module each."""
