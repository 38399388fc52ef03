// Python bindings of the plan of groups over several nodes: which node each rank is on, and for the simulator
// (ark_torch/simulation) who exchanges with whom, and which way a collective of some size takes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings_plan.hpp"
#include "collectives/carried_path.hpp"
#include "collectives/cuda/between/nodes_communicator.hpp"
#include "collectives/node_plan.hpp"
#include "process_group/process_group_ark.hpp"

namespace ark {

namespace {

namespace py = pybind11;

NodePlan plan_of(const std::vector<int>& node_of, int rank) {
  if (rank < 0 || rank >= static_cast<int>(node_of.size()))
    throw py::value_error("rank " + std::to_string(rank) + " is not in a group of " + std::to_string(node_of.size()) +
                          ": give node_of a node for every rank");
  return {node_of, rank};
}

Kind kind_of(const std::string& name) {
  for (int kind = 0; kind < kKinds; ++kind)
    if (name == name_of(static_cast<Kind>(kind))) return static_cast<Kind>(kind);
  throw py::value_error("kind '" + name + "' is no collective, such as 'all_reduce'");
}

py::dict described(const std::vector<int>& node_of, int rank) {
  const NodePlan plan = plan_of(node_of, rank);
  std::vector<std::vector<int>> members;
  std::vector<int> stand_ins;  // by node: who stands for this rank there
  for (int node = 0; node < plan.nodes(); ++node) {
    members.push_back(plan.members(node));
    stand_ins.push_back(plan.stands_for(rank, node));
  }
  py::dict made;
  made["members"] = members;
  made["stand_ins"] = stand_ins;
  made["others"] = plan.others();
  made["foreign"] = plan.foreign();
  made["peers"] = plan.peers();
  made["targets"] = plan.targets();
  made["rails"] = plan.rails();
  made["parcel_limit"] = plan.parcel_limit();
  return made;
}

py::tuple path_of(const std::string& kind, size_t bytes, size_t element, size_t partial,
                  const std::vector<int>& node_of) {
  if (element == 0 || partial == 0) throw py::value_error("element and partial are bytes, 1 or more");
  const CarriedPath path = carried_path(kind_of(kind), bytes, element, partial, plan_of(node_of, 0));
  return py::make_tuple(name_of(path.way), path.piece, path.pieces);
}

py::dict sizes() {
  py::dict made;
  made["first_message"] = kFirstMessage;
  made["first_room"] = kFirstRoom;
  made["sum_lag"] = kSumLag;
  made["pieces_ahead"] = kPiecesAhead;
  made["most_piece"] = kMostPiece;
  return made;
}

// How the kernels between nodes cut a message of a rail.
py::dict between_message(int nodes, uint64_t bytes) {
  if (nodes < 2 || nodes > device::kMostNodes)
    throw py::value_error(std::to_string(nodes) + " nodes: kernels are made for 2 to " +
                          std::to_string(device::kMostNodes));
  const rdma::GpuWindow::Shape shape = rdma::GpuWindow::Shape::of(nodes);
  std::vector<uint64_t> lanes;
  for (uint32_t lane = 0; lane < device::between_lanes(bytes, shape.lanes); ++lane)
    lanes.push_back(device::between_part(bytes, lane, shape.lanes).bytes);
  py::dict made;
  made["lanes"] = lanes;
  made["chunk"] = shape.chunk_bytes;
  made["slots"] = shape.slots;
  return made;
}

py::dict between_sizes() {
  py::dict made;
  made["whole"] = NodesCommunicator::kWhole;
  made["unit"] = NodesCommunicator::kUnit;
  made["scratch"] = BetweenStage::scratch_of(BetweenStage::Setup{}.scratch_bytes);
  made["most_nodes"] = device::kMostNodes;
  made["most_places"] = device::kMostPlaces;
  return made;
}

std::vector<int> nodes_of(const ProcessGroupArk& group) {
  std::vector<int> nodes(static_cast<size_t>(group.getSize()), 0);
  if (const auto& plan = group.core()->plan)
    for (int rank = 0; rank < group.getSize(); ++rank) nodes[static_cast<size_t>(rank)] = plan->node_of(rank);
  return nodes;
}

}  // namespace

void bind_nodes(py::module_& m) {
  m.def("_node_plan", &described, py::arg("node_of"), py::arg("rank"));
  m.def("_nodes_of", &nodes_of, py::arg("group"), "The node of each rank of the group, numbered from 0.");
  m.def("_carried_path", &path_of, py::arg("kind"), py::arg("bytes"), py::arg("element"), py::arg("partial"),
        py::arg("node_of"), "(way, piece, pieces): carried_path.hpp");
  m.def("_carried_sizes", &sizes);
  m.def("_between_message", &between_message, py::arg("nodes"), py::arg("bytes"),
        "Of a message between nodes on CUDA tensors: bytes of each lane, of a chunk, and slots (cuda/between.cuh)");
  m.def("_between_sizes", &between_sizes, "Of NodesCommunicator");
}

}  // namespace ark
