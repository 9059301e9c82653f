"""What people read of a run: the HTML pages, the comparison of runs, the card in the console."""
