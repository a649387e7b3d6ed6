-- Control messages between nodes. Every machine that sends one sends it again until it is answered, so the
-- table need not survive a crash.
create unlogged table bus (
    id       bigint generated always as identity primary key,
    node     text not null,
    body     bytea not null,
    sent_at  timestamptz not null default now()
);
create index bus_by_node on bus (node, id);
