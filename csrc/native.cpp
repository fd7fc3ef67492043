#include "bindings.h"

NB_MODULE(_native, m) {
    m.doc() =
        "Native core of equipoise: planner, shares, host routing, checksum, shipment, copier, words.";
    equipoise::bind_plan(m);
    equipoise::bind_planner(m);
    equipoise::bind_shares(m);
    equipoise::bind_tables(m);
    equipoise::bind_routing(m);
    equipoise::bind_routing_rules(m);
    equipoise::bind_checksum(m);
    equipoise::bind_shipment(m);
    equipoise::bind_copier(m);
    equipoise::bind_router(m);
    equipoise::bind_simulation(m);
    equipoise::bind_ordered_store(m);
}
