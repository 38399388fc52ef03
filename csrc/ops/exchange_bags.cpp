// Sorts a rank's bags by destination, exchanges sizes on the host, then sends lengths and indices together in one
// all_to_all, and weights in another. A rank that refuses its arguments says so with the sizes, so no rank waits for
// it.
#include "ops/exchange_bags.hpp"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "ops/meeting.hpp"

namespace ark::ops {

namespace {

using std::to_string;

constexpr const char* kExchangeBags = "exchange_bags";

// The data to send: lengths of bags by rank, and the number of entries per table. Values are ordered by rank, then
// table.
struct Parcels {
  std::vector<at::Tensor> lengths;           // per rank: [its tables, batch]
  std::vector<std::vector<int64_t>> counts;  // [rank][its table]
  at::Tensor values, weights;
};

// What ranks exchange first; the counts follow.
struct Card {
  int64_t refused = 0, batch = 0, wide = 0, weights = -1, device = 0, trained = 0;
};
constexpr size_t kCardWords = sizeof(Card) / sizeof(int64_t);

std::string table_of(const BagBatch& batch, size_t t) {
  return entry_of("tables", t) + " ('" + batch.names[t] + "')";
}

void check_shapes(const CallSite& site, const BagBatch& batch) {
  const auto integers = [&](const char* argument, const at::Tensor& tensor) {
    check_tensor(site, argument, tensor);
    if (tensor.scalar_type() != at::kInt && tensor.scalar_type() != at::kLong)
      refuse(site, ErrorKind::type_error, std::string(argument) + " is " + dtype_name(tensor.scalar_type()),
             "Pass torch.int32 or torch.int64.");
  };
  integers("values", batch.values);
  integers("lengths", batch.lengths);
  const auto tables = static_cast<int64_t>(batch.rows.size());
  if (batch.lengths.dim() != 2 || batch.lengths.size(0) != tables)
    refuse(site, ErrorKind::invalid_argument,
           "lengths has " + to_string(batch.lengths.numel()) + " elements, which are not " + to_string(tables) +
               " tables' of the same batch",
           "Pass lengths of all tables, one for each sample, table by table.");
  if (batch.values.dim() != 1 || batch.values.device() != batch.lengths.device())
    refuse(site, ErrorKind::invalid_argument,
           "values has " + to_string(batch.values.dim()) + " dimensions, on " + batch.values.device().str() +
               ", and lengths is on " + batch.lengths.device().str(),
           "Pass one dimension, on the device of lengths.");
  if (!batch.weights) return;
  check_tensor(site, "per_sample_weights", *batch.weights);
  if (batch.weights->sizes() != batch.values.sizes() || batch.weights->device() != batch.values.device())
    refuse(site, ErrorKind::invalid_argument, "per_sample_weights has not the shape and device of the indices",
           "Give each index a weight.");
}

// On the CPU checks all lengths and indices; on a GPU only what the host learns anyway. Returns the entries per table.
std::vector<int64_t> check_values(const CallSite& site, const BagBatch& batch) {
  const at::Tensor sums = batch.lengths.sum(1, false, at::kLong).cpu();
  std::vector<int64_t> counts(sums.const_data_ptr<int64_t>(), sums.const_data_ptr<int64_t>() + sums.numel());
  if (!batch.lengths.is_cuda() && batch.lengths.numel() > 0) {
    const at::Tensor least = batch.lengths.amin(1).to(at::kLong);
    for (size_t t = 0; t < counts.size(); ++t)
      if (const int64_t length = least.const_data_ptr<int64_t>()[t]; length < 0)
        refuse(site, ErrorKind::invalid_argument,
               "a bag of " + table_of(batch, t) + " has a length of " + to_string(length),
               "Pass lengths of 0 or more; offsets that grow.");
  }
  for (size_t t = 0; t < counts.size(); ++t)
    if (counts[t] < 0)
      refuse(site, ErrorKind::invalid_argument,
             "lengths of " + table_of(batch, t) + " add up to " + to_string(counts[t]),
             "Pass lengths of 0 or more; offsets that grow.");
  const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (all != batch.values.numel())
    refuse(site, ErrorKind::invalid_argument,
           "lengths add up to " + to_string(all) + ", and there are " + to_string(batch.values.numel()) + " indices",
           "Pass the length of every bag.");
  if (batch.values.is_cuda()) return counts;
  const at::Tensor values = batch.values.to(at::kLong).contiguous();
  const auto* value = values.const_data_ptr<int64_t>();
  for (size_t t = 0; t < counts.size(); ++t)
    for (int64_t i = 0; i < counts[t]; ++i, ++value)
      if (*value < 0 || *value >= batch.rows[t])
        refuse(site, ErrorKind::out_of_range,
               "index " + to_string(*value) + " is out of bounds for dimension 0 with size " +
                   to_string(batch.rows[t]) + " of " + table_of(batch, t),
               "Pass indices from 0 to below the number of rows.");
  return counts;
}

Parcels by_table(const BagBatch& batch, const std::vector<int64_t>& counts, int size) {
  Parcels parcels;
  std::vector<at::Tensor> values, weights;
  const std::vector<at::Tensor> of_table = batch.values.split_with_sizes(counts);
  std::vector<at::Tensor> weights_of_table;
  if (batch.weights) weights_of_table = batch.weights->split_with_sizes(counts);
  for (int rank = 0; rank < size; ++rank) {
    std::vector<at::Tensor> lengths;
    std::vector<int64_t> theirs;
    for (size_t t = 0; t < counts.size(); ++t) {
      if (batch.owners[t] != rank) continue;
      lengths.push_back(batch.lengths[static_cast<int64_t>(t)]);
      theirs.push_back(counts[t]);
      values.push_back(of_table[t]);
      if (batch.weights) weights.push_back(weights_of_table[t]);
    }
    parcels.lengths.push_back(lengths.empty() ? batch.lengths.narrow(0, 0, 0) : at::stack(lengths));
    parcels.counts.push_back(std::move(theirs));
  }
  parcels.values = at::cat(values);
  if (batch.weights) parcels.weights = at::cat(weights);
  return parcels;
}

Parcels by_row(const BagBatch& batch, const std::vector<int64_t>& counts, int size) {
  const int64_t tables = batch.lengths.size(0), bags = batch.lengths.numel(), entries = batch.values.numel();
  const at::TensorOptions options = at::TensorOptions(at::kLong).device(batch.values.device());
  std::vector<int64_t> blocks;
  for (const int64_t rows : batch.rows) blocks.push_back(std::max<int64_t>((rows + size - 1) / size, 1));
  const auto spread = [&](const at::Tensor& what, const at::Tensor& repeats) {
    return at::repeat_interleave(what, repeats, 0, entries);
  };
  const auto moved = [&](const std::vector<int64_t>& numbers) {
    return at::tensor(numbers, at::kLong).to(options.device());
  };
  const at::Tensor block = spread(moved(blocks), moved(counts));
  const at::Tensor bag = spread(at::arange(bags, options), batch.lengths.flatten().to(at::kLong));
  const at::Tensor wide = batch.values.to(at::kLong);
  // An invalid index stays invalid at the rank that receives it, whose kernel refuses it.
  const at::Tensor owner = at::div(wide, block, "floor").clamp_(0, size - 1);
  at::Tensor lengths = at::zeros({size * bags}, options);
  lengths.scatter_add_(0, owner.mul(bags).add_(bag), at::ones({1}, options).expand({entries}));
  lengths = lengths.view({size, tables, batch.lengths.size(1)});
  const at::Tensor sums = lengths.sum(2).cpu();
  const at::Tensor order = at::argsort(owner, /*stable=*/true, 0, false);
  Parcels parcels;
  parcels.values = at::sub(wide, owner.mul(block)).index_select(0, order).to(batch.values.scalar_type());
  if (batch.weights) parcels.weights = batch.weights->index_select(0, order);
  for (int rank = 0; rank < size; ++rank) {
    const auto* const from = sums.const_data_ptr<int64_t>() + rank * tables;
    parcels.counts.emplace_back(from, from + tables);
    parcels.lengths.push_back(lengths[rank].to(batch.lengths.scalar_type()));
  }
  return parcels;
}

int64_t sum_of(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// Reorders from [rank, table] to [table, rank]; `counts` holds the lengths of the pieces.
std::vector<at::Tensor> by_own_table(const at::Tensor& received, const std::vector<std::vector<int64_t>>& counts,
                                     const std::vector<int64_t>& begins) {
  const size_t tables = counts[0].size();
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> each(tables, 0);
  for (size_t t = 0; t < tables; ++t) {
    for (size_t rank = 0; rank < counts.size(); ++rank) {
      const auto first = counts[rank].begin();
      const int64_t at = begins[rank] + std::accumulate(first, first + static_cast<int64_t>(t), int64_t{0});
      pieces.push_back(received.narrow(0, at, counts[rank][t]));
      each[t] += counts[rank][t];
    }
  }
  return at::cat(pieces).split_with_sizes(each);
}

void compare_cards(const CallSite& site, const std::vector<Card>& cards) {
  const int size = static_cast<int>(cards.size());
  const auto differ = [&](int rank, const std::string& what, const std::string& remedy) {
    throw Error(ErrorKind::mismatch, "rank " + to_string(rank) + what,
                ErrorContext{site.rank, rank, kExchangeBags, 0, remedy});
  };
  for (int r = 0; r < size; ++r)
    if (cards[r].refused != 0) differ(r, " refused its arguments", "See that rank's error.");
  for (int r = 1; r < size; ++r) {
    if (cards[r].batch != cards[0].batch)
      differ(r, " has " + to_string(cards[r].batch) + " samples, rank 0 " + to_string(cards[0].batch),
             "Give every rank as many samples, for example by dropping the last batch.");
    if (cards[r].weights != cards[0].weights)
      differ(r, " has weights, or a dtype of weights, that rank 0 has not, or the other way round",
             "Pass per_sample_weights of one dtype on every rank, or on none.");
    if (cards[r].device != cards[0].device) differ(r, " has another kind of device than rank 0", "Move its bags.");
  }
}

}  // namespace

ReceivedBags exchange_bags(const BagBatch& batch) {
  return with_torch_errors([&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    ProcessGroupArk& group = backend_of(batch.group, kExchangeBags);
    const CallSite site{group.getRank(), kExchangeBags};
    const int size = group.getSize(), rank = group.getRank();
    const bool whole_tables = !batch.owners.empty();
    std::exception_ptr refused;  // sent first, so that no rank waits for this one
    Parcels parcels;
    Card card;
    try {
      check_shapes(site, batch);
      const std::vector<int64_t> counts = check_values(site, batch);
      card.batch = batch.lengths.size(1);
      card.wide = batch.values.scalar_type() == at::kLong;
      card.trained = batch.trained;
      card.device = static_cast<int64_t>(batch.values.device().type());
      if (batch.weights) card.weights = static_cast<int64_t>(batch.weights->scalar_type());
      parcels = whole_tables ? by_table(batch, counts, size) : by_row(batch, counts, size);
    } catch (...) {
      refused = std::current_exception();
      card.refused = 1;
    }
    std::vector<int64_t> words(&card.refused, &card.refused + kCardWords);
    for (const auto& counts : parcels.counts) words.insert(words.end(), counts.begin(), counts.end());
    words.resize(kCardWords + batch.rows.size() * (whole_tables ? 1 : static_cast<size_t>(size)));
    const auto told = tell_all(group, words);
    if (refused) std::rethrow_exception(refused);
    std::vector<Card> cards(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r)
      std::copy(told[r].begin(), told[r].begin() + static_cast<int64_t>(kCardWords), &cards[r].refused);
    compare_cards(site, cards);

    size_t skipped = kCardWords;  // words for the ranks before this one
    for (int r = 0; r < rank; ++r) skipped += parcels.counts[r].size();
    const size_t mine = parcels.counts[rank].size();
    const int64_t bags = static_cast<int64_t>(mine) * card.batch;
    std::vector<std::vector<int64_t>> counts;  // [rank][my table]
    for (const auto& one : told)
      counts.emplace_back(one.begin() + static_cast<int64_t>(skipped),
                          one.begin() + static_cast<int64_t>(skipped + mine));
    const bool wide = std::any_of(cards.begin(), cards.end(), [](const Card& one) { return one.wide != 0; });
    const at::ScalarType type = wide ? at::kLong : at::kInt;
    std::vector<at::Tensor> pieces;
    std::vector<int64_t> sent, received, sent_values, received_values, begins, weight_begins;
    int64_t from = 0, at = 0, weights_at = 0;
    for (int r = 0; r < size; ++r) {
      const int64_t out = sum_of(parcels.counts[r]), in = sum_of(counts[r]);
      pieces.push_back(parcels.lengths[r].flatten().to(type));
      pieces.push_back(parcels.values.narrow(0, from, out).to(type));
      sent.push_back(parcels.lengths[r].numel() + out), sent_values.push_back(out);
      received.push_back(bags + in), received_values.push_back(in);
      begins.push_back(at + bags), weight_begins.push_back(weights_at);
      from += out, at += bags + in, weights_at += in;
    }
    at::Tensor all = at::empty({at}, parcels.values.options().dtype(type));
    all_to_all_single(group, all, at::cat(pieces), received, sent);
    at::Tensor weights;
    if (batch.weights) {
      weights = at::empty({weights_at}, parcels.weights.options());
      all_to_all_single(group, weights, parcels.weights, received_values, sent_values);
    }
    ReceivedBags bags_of;
    bags_of.trained = std::any_of(cards.begin(), cards.end(), [](const Card& one) { return one.trained != 0; });
    if (mine == 0) return bags_of;
    std::vector<at::Tensor> lengths;
    for (int r = 0; r < size; ++r)
      lengths.push_back(all.narrow(0, begins[r] - bags, bags).view({static_cast<int64_t>(mine), card.batch}));
    const at::Tensor length = at::cat(lengths, 1);
    bags_of.offsets = length.cumsum(1, type).sub_(length).unbind(0);
    bags_of.indices = by_own_table(all, counts, begins);
    if (batch.weights) bags_of.weights = by_own_table(weights, counts, weight_begins);
    return bags_of;
  });
}

}  // namespace ark::ops
