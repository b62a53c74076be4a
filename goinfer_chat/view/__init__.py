"""What a person sees: replies, live figures, themes."""
