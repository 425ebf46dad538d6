"""What an adapter is; where it lies; whether it is sound; where it is loaded."""
