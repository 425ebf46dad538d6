// The token at which a draw falls among those that a sampler's limits leave of a row of logits. Knows no randomness.
//
// A row in canonical order (likeliest first, the lower token first among equals) without sorting it: weights fall into
// bins by the leading bits of their float, and only a bin in which something is decided is sorted. Of most rows only the
// head is looked at: the weights above HEAD, while of the others nothing but the sum is known. Filling the bins takes no
// decision per token: of flat rows, which have thousands above HEAD, each would be guessed wrong every other time.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "pool.h"
#include "vectors.h"

constexpr int BIN_SHIFT = 17, NUM_BINS = (0x3f800000 >> BIN_SHIFT) + 1;  // of weights in [0, 1]
constexpr float HEAD = 1.0f / 16384;                                    // the lower border of a bin
constexpr int HEAD_BIN = int(std::bit_cast<uint32_t>(HEAD) >> BIN_SHIFT);
constexpr int FIRST_BIN = 0x00800000 >> BIN_SHIFT;  // those below would hold denormal numbers, which no weight is

typedef std::pair<float, int64_t> Candidate;  // weight, token
typedef double vd __attribute__((vector_size(16)));

static float largest_of(const float* x, long V) {
  vf most = splat(-INFINITY);
  long i = 0;
  for (; i + L <= V; i += L) most = vmax(load<vf>(x + i), most);
  float largest = biggest(most);
  for (; i < V; i++) largest = std::max(largest, x[i]);
  return largest;
}

// The likeliest token of each row, the lowest among equals, and whether its logit (NaN if any is) is finite.
static void greedy(const float* logits, long ld, long S, long V, int64_t* tokens, int64_t* is_sound) {
  pool.run(S, [=](long s) {
    const float* x = logits + s * ld;
    vf most = splat(-INFINITY), differs = {};
    long i = 0, token = 0;
    for (; i + L <= V; i += L) {
      const vf here = load<vf>(x + i);
      most = vmax(here, most);
      differs = here == here ? differs : splat(1.0f);
    }
    float largest = biggest(most);
    bool has_nan = any_above(differs, 0.0f);
    for (; i < V; i++) {
      largest = std::max(largest, x[i]);
      has_nan |= x[i] != x[i];
    }
    while (token + L <= V && !any_at_least(load<vf>(x + token), largest)) token += L;
    while (token < V - 1 && !(x[token] >= largest)) token++;
    tokens[s] = token;
    is_sound[s] = !has_nan && std::isfinite(largest);
  });
}

class Order {
 public:
  // The softmax weights of a row, 1 for the likeliest; below e^-87 they are 0.
  void fill(const float* x, long V, float inverse) {
    const float top = largest_of(x, V);
    weights_.resize((V + L - 1) / L * L);
    bins_.assign(NUM_BINS, {});
    is_whole_ = false;
    size_ = V;
    double tail = 0.0;
    vf low_sums = {};
    for (long i = 0; i < V; i += L) {
      vf logits = splat(-INFINITY);
      if (i + L <= V) logits = load<vf>(x + i);
      else std::memcpy(&logits, x + i, sizeof(float) * (V - i));
      const vf shifted = (logits - top) * inverse;
      const vf weight = vmin(shifted > -87.0f ? vexp(shifted) : vf{}, splat(1.0f));
      store(weights_.data() + i, weight);
      const vf low = weight < HEAD ? weight : vf{};
      low_sums += low;
      if (i % (32 * L) == 31 * L) {
        tail += sum(low_sums);
        low_sums = vf{};
      }
      if (any_at_least(weight, HEAD)) take(weight - low);
    }
    close(HEAD_BIN);
    total_ = mass_ + tail + sum(low_sums);
  }

  long num_at_least(float least) const {
    return std::count_if(weights_.begin(), weights_.begin() + size_, [=](float weight) { return weight >= least; });
  }

  // Mass of the first `count` tokens.
  double mass_of(long count) {
    if (count == size_) return total_;
    if (count > num_binned_) take_all();
    double mass = 0.0;
    int bin = NUM_BINS - 1;
    for (; bin > lowest_ && count > bins_[bin].count; bin--) {
      mass += bins_[bin].mass;
      count -= long(bins_[bin].count);
    }
    open(bin);
    for (long i = 0; i < std::min<long>(count, members_.size()); i++) mass += members_[i].first;
    return mass;
  }

  // The first token at which the mass so far, its own included, reaches `mass` (exceeds it, if `is_strict`); of the first
  // `limit` tokens. Its place in the order and the mass up to it come back.
  int64_t token_at(double mass, bool is_strict, long limit, long& place, double& reached) {
    const auto is_there = [=](double sum) { return is_strict ? sum > mass : sum >= mass; };
    if (!is_there(mass_) && limit > num_binned_) take_all();
    reached = 0.0;
    place = 0;
    int bin = NUM_BINS - 1;
    for (; bin > lowest_ && !is_there(reached + bins_[bin].mass) && place + long(bins_[bin].count) < limit; bin--) {
      reached += bins_[bin].mass;
      place += long(bins_[bin].count);
    }
    open(bin);
    for (const Candidate& each : members_) {
      reached += each.first;
      if (is_there(reached) || place + 1 >= limit) return each.second;
      place++;
    }
    return members_.back().second;
  }

 private:
  struct Bin {
    double mass = 0.0, count = 0.0;
  };

  static int bin_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return int(bits >> BIN_SHIFT);
  }

  // Into the bins. Weights of 0 go where nobody looks, each lane's elsewhere: none waits for the one before it.
  void take(vf weights) {
    vu lanes;
    for (int l = 0; l < L; l++) lanes[l] = l;
    static_assert(L <= FIRST_BIN);
    const vu each = (vu)weights >> BIN_SHIFT;
    float weight[L];
    uint32_t bin[L];
    store(weight, weights);
    store(bin, each > lanes ? each : lanes);
    Bin* bins = bins_.data();
#pragma GCC unroll 16
    for (int l = 0; l < L; l++) store(bins + bin[l], load<vd>(bins + bin[l]) + vd{weight[l], 1.0});
  }

  void take_all() {
    if (is_whole_) return;
    is_whole_ = true;
    for (long i = 0; i < size_; i += L) {
      const vf weight = load<vf>(weights_.data() + i);
      take(weight < HEAD ? weight : vf{});
    }
    close(FIRST_BIN);
  }

  void close(int first) {  // nothing more comes into the bins from `first` on
    mass_ = 0.0;
    num_binned_ = 0;
    for (int bin = NUM_BINS - 1; bin >= first; bin--) {
      if (bins_[bin].count == 0.0) continue;
      mass_ += bins_[bin].mass;
      num_binned_ += long(bins_[bin].count);
      lowest_ = bin;
    }
  }

  void open(int bin) {  // its members in order
    members_.clear();
    const uint32_t borders[2] = {uint32_t(bin) << BIN_SHIFT, (uint32_t(bin) + 1) << BIN_SHIFT};
    const vf least = (vf)splat(borders[0]), most = (vf)splat(borders[1]);
    for (long i = 0; i < size_; i += L) {
      const vf weight = load<vf>(weights_.data() + i);
      const vf inside = weight >= least ? (weight < most ? splat(1.0f) : vf{}) : vf{};
      if (!any_above(inside, 0.5f)) continue;
      const long last = std::min(i + L, size_);
      for (long k = i; k < last; k++)
        if (bin_of(weights_[k]) == bin) members_.push_back({weights_[k], k});
    }
    std::sort(members_.begin(), members_.end(), [](const Candidate& a, const Candidate& b) {
      return a.first > b.first || (a.first == b.first && a.second < b.second);
    });
  }

  std::vector<float> weights_;
  std::vector<Bin> bins_;
  std::vector<Candidate> members_;
  long size_ = 0, num_binned_ = 0;
  double mass_ = 0.0, total_ = 0.0;  // of what is in closed bins; of all
  int lowest_ = 0;                   // of them that holds anything
  bool is_whole_ = false;
};

// One token per row: of those that min-p leaves, then top-k, then top-p, each of what the former left, the one at which
// the mass passes draw · mass of all that is left. limits are [3][S]: top_k (∞ = all), top_p, min_p.
static void draw(const float* logits, long ld, long S, long V, const float* temperatures, const double* limits,
                 const double* draws, int64_t* tokens) {
  pool.run(S, [=](long s) {
    static thread_local Order order;
    const float* x = logits + s * ld;
    const double top_k = limits[s], top_p = limits[S + s], min_p = limits[2 * S + s];
    order.fill(x, V, 1.0f / temperatures[s]);
    long kept = min_p > 0.0 ? order.num_at_least(float(min_p)) : V;
    if (top_k < double(kept)) kept = long(top_k);
    double mass = order.mass_of(kept);
    long place = 0;
    if (top_p < 1.0) {
      order.token_at(top_p * mass, false, kept, place, mass);
      kept = std::min(kept, place + 1);
    }
    double reached = 0.0;
    tokens[s] = order.token_at(draws[s] * mass, true, kept, place, reached);
  });
}
