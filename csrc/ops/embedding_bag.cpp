// The forward pass of embedding_bag_all_to_all: checks the arguments, agrees on them between ranks, and calls the CPU's
// or the GPU's implementation.
#include "ops/embedding_bag.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <numeric>

#include "cuda/fused/embedding_bag.cuh"

namespace ark::ops {

namespace {

using std::to_string;

struct Card {
  int64_t refused = 0, tables = 0, batch = -1, dim = -1, dtype = -1, device = -1, trained = 0, mean = 0;
};

[[noreturn]] void refuse_value(const CallSite& site, const std::string& what, const std::string& remedy) {
  refuse(site, ErrorKind::invalid_argument, what, remedy);
}

void check_lists(const CallSite& site, const BagArguments& bags) {
  if (bags.mode != "sum" && bags.mode != "mean")
    refuse_value(site, "mode is '" + bags.mode + "'", "Pass 'sum' or 'mean'.");
  check_count(site, "indices", bags.indices.size(), bags.tables.size(), "one a table");
  check_count(site, "offsets", bags.offsets.size(), bags.tables.size(), "one a table");
  if (bags.weights.empty()) return;
  check_count(site, "per_sample_weights", bags.weights.size(), bags.tables.size(), "one a table");
  if (bags.mode != "sum")
    refuse_value(site, "per_sample_weights are given, and mode is 'mean'", "Pass mode='sum', or no weights.");
}

void check_integers(const CallSite& site, const std::string& argument, const at::Tensor& tensor, c10::Device device) {
  check_tensor(site, argument.c_str(), tensor);
  if (tensor.scalar_type() != at::kInt && tensor.scalar_type() != at::kLong)
    refuse(site, ErrorKind::type_error, argument + " is " + dtype_name(tensor.scalar_type()),
           "Pass torch.int32 or torch.int64.");
  if (tensor.dim() != 1)
    refuse_value(site, argument + " has " + to_string(tensor.dim()) + " dimensions", "Pass one dimension.");
  if (tensor.device() != device)
    refuse_value(site, argument + " is on " + tensor.device().str() + " but tables[0] is on " + device.str(),
                 "Move it there.");
}

void check_table(const CallSite& site, const BagArguments& bags, size_t t) {
  const at::Tensor& table = bags.tables[t];
  const at::Tensor& first = bags.tables[0];
  const std::string name = entry_of("tables", t);
  check_tensor(site, name.c_str(), table);
  const at::ScalarType type = table.scalar_type();
  const bool known = type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
  if (!known || (type == at::kDouble && table.is_cuda()))
    refuse(site, ErrorKind::type_error, name + " is " + dtype_name(type) + " on " + table.device().str(),
           "Pass float32, float16 or bfloat16 (on the CPU float64, too).");
  if (table.dim() != 2)
    refuse_value(site, name + " has " + to_string(table.dim()) + " dimensions", "Pass [rows, dim].");
  if (!table.is_contiguous()) refuse_value(site, name + " is not contiguous", "Call contiguous() on it, once.");
  check_same_dtype(site, name.c_str(), table, "tables[0]", first);
  if (table.device() != first.device())
    refuse_value(site, name + " is on " + table.device().str() + " but tables[0] is on " + first.device().str(),
                 "Put all tables of a rank on its device.");
  if (table.size(1) != first.size(1))
    refuse_value(site, name + " has " + to_string(table.size(1)) + " columns, tables[0] " + to_string(first.size(1)),
                 "Group tables by their dimension, and make a call for each.");
  if (table.is_cuda() &&
      (table.size(0) > 0xffffffffll || bags.indices[t].numel() > 0xffffffffll || bags.offsets[t].numel() > 0x7ffffffll))
    refuse_value(site,
                 name + " has 2^32 rows, or indices[" + to_string(t) + "] so many, or offsets[" + to_string(t) +
                     "] 2^27, or more",
                 "Split it.");
}

int64_t bags_of(const BagArguments& bags, size_t t) {
  return bags.offsets[t].numel() - (bags.last_offset ? 1 : 0);
}

void check_bags(const CallSite& site, const BagArguments& bags, size_t t, int size) {
  const std::string offsets = entry_of("offsets", t);
  if (const int64_t count = bags_of(bags, t); count < 0 || count % size != 0)
    refuse_value(site,
                 offsets + " has " + to_string(bags.offsets[t].numel()) + " elements, and " + to_string(size) +
                     " ranks have equal parts of the batch" + (bags.last_offset ? " (one offset more)" : ""),
                 "Give each table the bags of all ranks' samples: world size times the batch of a rank.");
  if (bags_of(bags, t) != bags_of(bags, 0))
    refuse_value(site,
                 offsets + " has " + to_string(bags.offsets[t].numel()) + " elements, offsets[0] " +
                     to_string(bags.offsets[0].numel()),
                 "Give all tables bags of the same samples.");
  if (bags.weights.empty()) return;
  const std::string weights = entry_of("per_sample_weights", t);
  check_tensor(site, weights.c_str(), bags.weights[t]);
  check_same_dtype(site, weights.c_str(), bags.weights[t], "tables[0]", bags.tables[0]);
  if (bags.weights[t].sizes() != bags.indices[t].sizes() || bags.weights[t].device() != bags.indices[t].device())
    refuse_value(site, weights + " has not the shape and device of " + entry_of("indices", t),
                 "Give each index a weight.");
}

// On the CPU, checks every offset and every index.
template <class I>
void check_values(const CallSite& site, const BagArguments& bags, size_t t) {
  const at::Tensor indices = bags.indices[t].contiguous(), offsets = bags.offsets[t].contiguous();
  const I* const index = indices.const_data_ptr<I>();
  const I* const offset = offsets.const_data_ptr<I>();
  const int64_t entries = indices.numel(), rows = bags.tables[t].size(0);
  I before = 0;
  for (int64_t i = 0; i < offsets.numel(); ++i) {
    if (offset[i] < before || offset[i] > entries || (i == 0 && offset[0] != 0))
      refuse_value(site,
                   "offsets[" + to_string(t) + "][" + to_string(i) + "] is " + to_string(offset[i]) +
                       ", and offsets grow from 0 to at most " + to_string(entries) + ", the number of indices",
                   "Pass where each bag begins.");
    before = offset[i];
  }
  for (int64_t i = 0; i < entries; ++i) {
    if (index[i] >= 0 && index[i] < rows) continue;
    refuse(site, ErrorKind::out_of_range,
           "index " + to_string(index[i]) + " is out of bounds for dimension 0 with size " + to_string(rows) +
               " of tables[" + to_string(t) + "] (indices[" + to_string(t) + "][" + to_string(i) + "])",
           "Pass indices from 0 to below the number of rows.");
  }
}

void check_rate(const CallSite& site, const BagArguments& bags) {
  const RowUpdate& update = bags.update;
  if (!update.rate) refuse_value(site, "the optimizer has no lr", "Pass a learning rate.");
  check_tensor(site, "the optimizer's lr", *update.rate);
  const bool narrow = update.rate->scalar_type() == at::kFloat;
  if (!narrow && (update.rate->is_cuda() || update.rate->scalar_type() != at::kDouble))
    refuse(site, ErrorKind::type_error, "the optimizer's lr is " + dtype_name(update.rate->scalar_type()),
           "Pass float32 (on the CPU float64, too).");
  if (update.rate->numel() != 1 || update.rate->device() != bags.tables[0].device())
    refuse_value(site,
                 "the optimizer's lr has " + to_string(update.rate->numel()) + " elements on " +
                     update.rate->device().str() + ", and tables[0] is on " + bags.tables[0].device().str(),
                 "Pass one element, on the tables' device.");
}

void check_update(const CallSite& site, const BagArguments& bags) {
  const RowUpdate& update = bags.update;
  if (update.kind != "dense" && update.kind != "sparse" && update.kind != "sgd" && update.kind != "rowwise_adagrad")
    refuse_value(site, "update is '" + update.kind + "'", "Pass 'dense', 'sparse', 'sgd' or 'rowwise_adagrad'.");
  check_count(site, "the optimizer's state", update.state.size(), update.adapts() ? bags.tables.size() : 0,
              "one a table where the optimizer adapts, else none");
  if (!update.in_place() || bags.tables.empty()) return;
  check_rate(site, bags);
  if (!(update.eps >= 0)) refuse_value(site, "eps is " + to_string(update.eps), "Pass 0 or more.");
  for (size_t t = 0; t < bags.tables.size(); ++t) {
    const at::Tensor& table = bags.tables[t];
    for (size_t other = 0; other < t; ++other)
      if (table.numel() > 0 && table.is_alias_of(bags.tables[other]) &&
          at::get_overlap_status(table, bags.tables[other]) != at::MemOverlapStatus::No)
        refuse_value(site,
                     entry_of("tables", t) + " shares memory with " + entry_of("tables", other) +
                         ", and both would be updated at once",
                     "Pass a table once, or take gradients instead of an update in place.");
    if (!update.adapts()) continue;
    const std::string name = "the optimizer's state[" + to_string(t) + "]";
    const at::Tensor& state = update.state[t];
    check_tensor(site, name.c_str(), state);
    const at::ScalarType wanted = table.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    if (state.scalar_type() != wanted)
      refuse(site, ErrorKind::type_error, name + " is " + dtype_name(state.scalar_type()),
             "Pass " + dtype_name(wanted) + ".");
    if (state.dim() != 1 || state.size(0) != table.size(0) || !state.is_contiguous() ||
        state.device() != table.device())
      refuse_value(site, name + " is not [" + to_string(table.size(0)) + "], contiguous, on " + table.device().str(),
                   "Pass one element a row of the table.");
  }
}

void check(const CallSite& site, const BagArguments& bags, int size) {
  check_lists(site, bags);
  for (size_t t = 0; t < bags.tables.size(); ++t) {
    check_table(site, bags, t);
    check_integers(site, entry_of("indices", t), bags.indices[t], bags.tables[0].device());
    check_integers(site, entry_of("offsets", t), bags.offsets[t], bags.tables[0].device());
    check_bags(site, bags, t, size);
    if (bags.tables[t].is_cuda()) continue;
    if (bags.indices[t].scalar_type() == at::kInt && bags.offsets[t].scalar_type() == at::kInt) {
      check_values<int32_t>(site, bags, t);
    } else {
      BagArguments wide = bags;
      wide.indices[t] = wide.indices[t].to(at::kLong), wide.offsets[t] = wide.offsets[t].to(at::kLong);
      check_values<int64_t>(site, wide, t);
    }
  }
  check_update(site, bags);
  if (!bags.tables_per_rank.empty())
    check_count(site, "tables_per_rank", bags.tables_per_rank.size(), size, "one a rank");
}

Card card_of(const BagArguments& bags, int size, bool trained) {
  Card card;
  card.tables = static_cast<int64_t>(bags.tables.size());
  card.trained = trained;
  card.mean = bags.mode == "mean";
  if (card.tables == 0) return card;
  card.batch = bags_of(bags, 0) / size;
  card.dim = bags.tables[0].size(1);
  card.dtype = static_cast<int64_t>(bags.tables[0].scalar_type());
  card.device = static_cast<int64_t>(bags.tables[0].device().type());
  return card;
}

}  // namespace

BagArguments prepared(const BagArguments& bags) {
  BagArguments plain = bags;
  bool wide = false;
  for (size_t t = 0; t < bags.tables.size(); ++t)
    wide = wide || bags.indices[t].scalar_type() == at::kLong || bags.offsets[t].scalar_type() == at::kLong;
  const at::ScalarType type = wide ? at::kLong : at::kInt;
  for (size_t t = 0; t < bags.tables.size(); ++t) {
    plain.indices[t] = plain.indices[t].to(type).contiguous();
    plain.offsets[t] = plain.offsets[t].to(type).contiguous();
    if (!plain.weights.empty()) plain.weights[t] = plain.weights[t].contiguous();
  }
  return plain;
}

int64_t Layout::all() const {
  return std::accumulate(tables.begin(), tables.end(), int64_t{0});
}

int64_t Layout::first(int rank) const {
  return std::accumulate(tables.begin(), tables.begin() + rank, int64_t{0});
}

uint64_t Layout::fingerprint() const {
  uint64_t hash = 1;
  const auto add = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  };
  for (const int64_t count : tables) add(count);
  add(batch), add(dim), add(static_cast<int64_t>(dtype));
  return hash | 1;
}

c10::Device device_of(const BagArguments& bags, const Layout& layout, ProcessGroupArk& group) {
  if (!bags.tables.empty()) return bags.tables[0].device();
  if (layout.device == c10::kCPU) return c10::kCPU;
  if (bags.like && bags.like->is_cuda()) return bags.like->device();
  if (const auto bound = group.getBoundDeviceId(); bound && bound->is_cuda()) return *bound;
  return cuda_guard().getDevice();
}

Layout meet(const BagArguments& bags, ProcessGroupArk& group, const char* operation, bool trained) {
  const CallSite site{group.getRank(), operation};
  const int size = group.getSize();
  std::optional<Error> refused;
  Card card;
  try {
    check(site, bags, size);
    card = card_of(bags, size, trained);
  } catch (const Error& error) {
    refused = error;
    card.refused = 1;
  }
  const auto* const words = &card.refused;
  const auto told = tell_all(group, std::vector<int64_t>(words, words + sizeof(Card) / sizeof(int64_t)));
  if (refused) throw *refused;
  std::vector<Card> cards(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) std::copy(told[r].begin(), told[r].end(), &cards[r].refused);
  Layout layout;
  int known = -1;  // a rank that has tables
  for (int r = 0; r < size; ++r) {
    const Card& one = cards[r];
    if (one.refused != 0)
      throw Error(ErrorKind::mismatch, "rank " + to_string(r) + " refused its arguments",
                  ErrorContext{site.rank, r, operation, 0, "See that rank's error."});
    layout.tables.push_back(one.tables);
    if (one.tables == 0) continue;
    if (known < 0) {
      known = r;
      continue;
    }
    const Card& first = cards[known];
    const auto compare = [&](const char* what, int64_t Card::*field) {
      if (one.*field == first.*field) return;
      throw Error(ErrorKind::mismatch,
                  "rank " + to_string(r) + " has another " + what + " than rank " + to_string(known) + " (" +
                      to_string(one.*field) + ", " + to_string(first.*field) + ")",
                  ErrorContext{site.rank, r, operation, 0, "Pass the same on every rank that has tables."});
    };
    compare("batch", &Card::batch);
    compare("dimension of the tables", &Card::dim);
    compare("dtype", &Card::dtype);
    compare("kind of device", &Card::device);
    compare("answer to whether its tables or weights take gradients", &Card::trained);
    compare("mode", &Card::mean);
  }
  if (known < 0) refuse_value(site, "no rank has a table", "Pass tables on one rank at least.");
  const Card& first = cards[known];
  layout.batch = first.batch, layout.dim = first.dim;
  layout.dtype = static_cast<at::ScalarType>(first.dtype);
  layout.device = static_cast<c10::DeviceType>(first.device);
  layout.trained = first.trained != 0;
  return layout;
}

Layout layout_of(const BagArguments& bags, ProcessGroupArk& group, const char* operation) {
  const CallSite site{group.getRank(), operation};
  const bool blind = bags.tables.empty();
  const bool complete = !bags.tables_per_rank.empty() && (!blind || (bags.batch >= 0 && bags.dim >= 0 && bags.like));
  const bool cuda = blind ? bags.like && bags.like->is_cuda() : bags.tables[0].is_cuda();
  const bool all_have =
      std::find(bags.tables_per_rank.begin(), bags.tables_per_rank.end(), 0) == bags.tables_per_rank.end();
  if (!complete || (!bags.met && (!cuda || !all_have))) return meet(bags, group, operation, false);
  check(site, bags, group.getSize());
  Layout layout;
  layout.tables = bags.tables_per_rank;
  if (layout.tables[group.getRank()] != static_cast<int64_t>(bags.tables.size()))
    refuse_value(site,
                 "tables_per_rank says " + to_string(layout.tables[group.getRank()]) + " of this rank, which has " +
                     to_string(bags.tables.size()),
                 "Pass how many tables each rank has.");
  layout.batch = blind ? bags.batch : bags_of(bags, 0) / group.getSize();
  layout.dim = blind ? bags.dim : bags.tables[0].size(1);
  layout.dtype = blind ? bags.like->scalar_type() : bags.tables[0].scalar_type();
  layout.device = blind ? bags.like->device().type() : bags.tables[0].device().type();
  return layout;
}

at::Tensor forward(const BagArguments& given) {
  constexpr const char* kName = "embedding_bag_all_to_all";
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    ProcessGroupArk& group = backend_of(given.group, kName);
    const Layout layout = layout_of(given, group, kName);
    const BagArguments bags = prepared(given);
    if (layout.batch * layout.dim * layout.all() == 0)
      return at::empty({layout.batch, layout.all(), layout.dim},
                       at::TensorOptions(layout.dtype).device(device_of(bags, layout, group)));
    return layout.device == c10::kCPU ? forward_cpu(bags, layout, group) : forward_cuda(bags, layout, group);
  });
}

}  // namespace ark::ops
