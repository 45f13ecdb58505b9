"""Valid files, ways to damage them, and a campaign that reads the damaged ones in processes that may die."""
