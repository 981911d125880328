"""The part of the audit that computes with torch; it is imported only by the claims that need it."""
