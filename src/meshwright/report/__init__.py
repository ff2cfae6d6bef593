"""What people look at: text pictures of layouts, schedules and programs."""
