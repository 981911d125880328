"""One module for each group of claims: functions that compare a run's records with its files."""
