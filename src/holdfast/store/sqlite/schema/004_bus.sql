-- Control messages between nodes go through PostgreSQL only: one SQLite file is served by one node.
select 1;
