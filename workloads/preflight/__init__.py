"""What one node is, sees and reaches, gathered before anything is started on it; `orchestrator.nodes` judge."""
