"""The working folder and the clock of a long job."""
