"""One file per kind of source: rows in, documents out, with a reason for every row that is dropped."""
