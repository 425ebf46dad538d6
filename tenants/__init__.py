"""Who may ask for how much, and what they used."""
