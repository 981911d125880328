"""The converted model beside its parent: accuracy, agreement, likelihood, speed."""
