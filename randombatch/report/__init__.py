"""Tables, plots and pages made of what runs have written."""
